"""Chat templates with tools, in the styles of well-known models, small enough to read."""

from __future__ import annotations

HERMES = """{% if tools %}
<|im_start|>system
You may call one or more functions. They are described within <tools></tools>:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>
For each call, return a JSON object with the function's name and its arguments within <tool_call></tool_call>:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == "tool" %}
<|im_start|>tool
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.tool_calls %}
<|im_start|>assistant
{{ message.content }}
{% for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% else %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
